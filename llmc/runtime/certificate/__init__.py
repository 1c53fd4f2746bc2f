"""Certificates: that a bundle, once it was warmed up, served requests and nothing was compiled.

monitors.py   what the whole process compiles and writes, before it was ready and since; an executor has its own
requests.py    random requests that a plan admits, through the engine
certifying.py  all of it in order
document.py    what a certificate holds, and the rules of its members
checking.py    whether one can be believed, of a bundle and here
"""
