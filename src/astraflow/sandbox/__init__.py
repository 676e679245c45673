"""Where code that nobody trusts is run, and judged by tests that it cannot see.

    reward, workflow            supervisor (a process of its own)             boxes (bubblewrap, each slot its own user)
    Sandbox.run(job) ──socket──► slot 0 ─┬─ starts, watches, kills ─────────► candidate: the code, one box for each job
                     ◄─verdict─  slot 1  └─ job, and the socket of the ─────► driver: the tests, a box that stays
                                 ...        candidate's box                    driver ◄──values, as JSON──► candidate

| who        | knows                                   | may do                                                  |
|------------|-----------------------------------------|---------------------------------------------------------|
| candidate  | its code, arguments of calls, inputs    | answer calls with plain values                          |
| driver     | tests, expected outputs                 | compare; read values as JSON with a limit of size       |
| supervisor | jobs, verdicts                          | kill boxes at their limits of time and memory           |
"""
