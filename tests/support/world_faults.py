"""A calculator whose processes crash, hang and raise now and then."""

import os
import time

from astraflow.environments.calculator import Calculator


class Flaky(Calculator):
    """Counts the episodes of its process."""

    runs = "cpu"
    begun = 0

    def reset(self, task):
        Flaky.begun += 1
        if Flaky.begun % 6 == 5:
            raise RuntimeError("no disk")
        return super().reset(task)

    def step(self, action):
        if Flaky.begun % 14 == 12:
            os._exit(3)
        if Flaky.begun % 23 == 21:
            time.sleep(600)
        return super().step(action)
