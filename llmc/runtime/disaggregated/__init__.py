"""Disaggregated prefill/decode: prefill on one executor, decode on another, in one process, in two, or on two hosts."""
