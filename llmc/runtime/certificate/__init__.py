"""Certificates: that a bundle, once it was warmed up, served requests and nothing was compiled.

witnesses/     who sees what the whole process compiles, starts and writes; an executor has its own
watch.py       all witnesses over one run: what they saw before it was ready, and since
requests.py    random requests that a plan admits
driving.py     these through the engine
numbers.py     some of them again, alone
certifying.py  all of it in order
document.py    what a certificate holds, and the rules of its members
checking.py    whether one can be believed, of a bundle and here
"""
