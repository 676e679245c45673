"""Stands for the program that plays tasksets: answers as it is told by the number of the task."""

import json
import os
import sys
import time

mode = sys.argv[1]


def say(text, to=sys.stdout):
    to.write(f"{text}\n")
    to.flush()


if mode == "broken":
    say("ImportError: no taskset", sys.stderr)
    sys.exit(1)
if mode == "problem":
    say(json.dumps({"problem": "ModuleNotFoundError: no_such_taskset"}))
    sys.exit(0)
if mode == "slow":
    time.sleep(600)
say(json.dumps({"tasks": 3}))
held = None
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("cancel"):
        say(json.dumps({"id": held["id"], "error": "cancelled"}))
        continue
    match asked["task"]:
        case 0:
            answer = {"reward": 1.0, "metrics": {"length": 3, "pid": os.getpid()}}
        case 1:
            answer = {"error": "ProviderError: no model"}
        case 2:
            os._exit(7)
        case 3:
            held = asked
            continue
        case _:
            say("what is this")
            answer = {"reward": float(asked["task"])}
    say(json.dumps({"id": asked["id"], **answer}))
