"""Work of unknown cost, in child processes that can be stopped: schemas, expressions and grammars of requests, and chat
templates of bundles. A child has limits on time, memory and stack. A job beyond a limit fails only its own request.

pool.py (this process)
    ── a socket for each child ──►  nursery.py (one process): forks children, tells their ends, kills those whose
                                    socket was closed, and ends with all of them when this process does
    ◄── JSON (frames.py) ──►        a child: jobs one after the other, each within the bounds of limits.py
"""
