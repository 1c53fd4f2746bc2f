"""Load tests of any OpenAI-compatible server over HTTP.

    workload (lengths, times) + prompts ──► run ──► client, a task a request ──► Outcome ──► Report ──► text, plots

Open loop: every request has a time when it is due, which no earlier answer delays, and its latencies count from that
time. So a stall of the server shows in the latencies of all requests that it delays (no coordinated omission). Closed
loop: a given number of clients, each of which sends its next request when its last one was answered.
"""
