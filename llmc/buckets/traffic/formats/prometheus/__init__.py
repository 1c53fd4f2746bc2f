"""Prometheus histograms of prompt and generation lengths: scrape files, the HTTP API's answers, a live server."""
