"""Processes for work that may hang, crash, leak or block: graders, heavy environments.

    reward, environment                 thread of each process              process, in a session of its own
    pool.call("verify", a, b) ──queue──► one call at a time ────socket────► target("verify")(a, b)
    seat.call("step", move)   ──queue──► deadline: SIGKILL, a new process   state of several seats
                              ◄─────────────────────────────────────────── a plain value, as JSON

The code is trusted not to be malicious; what a model wrote runs in `sandbox`.
"""
