"""Is an environment one: what every environment must hold, shown by policies that need no model.

from astraflow.testing.environments.suite import check_environment

def test_my_environment():
    report = check_environment("my_module:Guess", [{"number": "3"}], oracle=lambda task, told, chance: task["number"])
    assert report.random < 0.5
"""
