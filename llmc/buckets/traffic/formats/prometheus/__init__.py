"""Prometheus histograms of prompt and generation lengths: scrape files, HTTP API responses, a live server."""
