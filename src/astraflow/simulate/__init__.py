"""A run file on a simulated clock: how long a step would take, who would wait, how old what is trained would be.

run file ─┐                       ┌─ nodes: leases, calls, decode steps, commits, fetches, swaps
          ├─► world.simulate ─►───┼─ dataflow: gate, groups, queues, batches
profile ──┘  (events, seeded)     └─ trainers: steps, versions, acknowledgements
"""
