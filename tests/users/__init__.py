"""What users write in their programs, on two ranks: each trains as one process would, or is refused.

A redesign of Pipeline keeps these tests.
"""
