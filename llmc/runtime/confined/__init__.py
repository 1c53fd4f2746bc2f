"""Child processes for work of unknown cost: schemas, regular expressions and grammars of requests, and chat templates.

Each child has limits on CPU time, memory and stack. A job beyond a limit fails only its own request.

    pool.py (this process)
        ── a socket for each child ──►  nursery.py (one process): forks children, reports their exits, kills those whose
                                        socket was closed, and ends with all of them when this process does
        ◄── JSON (frames.py) ──►        a child: runs one job at a time, each within the limits of limits.py
"""
