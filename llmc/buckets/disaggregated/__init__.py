"""Disaggregated prefill/decode on two devices, compared with the better of the two devices alone."""
