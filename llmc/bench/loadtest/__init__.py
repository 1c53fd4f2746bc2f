"""Load tests of any OpenAI-compatible server over HTTP.

    workload (lengths, times) + prompts ──► run ──► client, a task a request ──► Outcome ──► Report ──► text, plots

Open loop: every request has a time at which it is to be sent, which no earlier answer delays, and its latencies count
from that time, so that a server that stalls cannot hide what its stall cost (coordinated omission). Closed loop: a
given number of clients, each of which sends its next request when its last was answered.
"""
