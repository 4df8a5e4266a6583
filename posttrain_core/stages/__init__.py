"""The six stages (plan, generate, execute, verify, update, publish) and the warm start before them (sft).

Each takes references and returns references; rows stay in the store. A stage looks for its committed output first.
"""
