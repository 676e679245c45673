"""Sources of programming tasks. Their rows have one shape, which the reward `code` judges:

| field | holds |
|---|---|
| question | what a model is asked |
| entries | names that the code defines and the tests use |
| header | imports and functions that the question gives: put before the code |
| stub | text that an answer may go on from, if it does not define the entries itself; "": there is none |
| setup | Python that runs with the tests, never the code's |
| given | the same, and it may use the entries |
| tests | each is Python that raises unless the code is right |
| cases | (standard input, expected output) of whole programs; such tasks have no tests |
| test_stub | text that a reply without `assert` goes on from, where a model writes tests; may lack |
| solution | code that passes; "": not known |
"""
