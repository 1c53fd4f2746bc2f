"""Certificates: evidence that a warmed-up bundle served requests without compiling anything.

monitors.py    compilations and cache writes of the whole process, before and after ready; executors add monitors
requests.py    random requests within the plan's limits, run through the engine
certifying.py  the whole procedure
document.py    the file format and its validation
checking.py    whether a certificate is trusted, matches a bundle and holds on this host
"""
