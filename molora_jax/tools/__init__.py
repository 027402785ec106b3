"""Command-line tools for adapter folders and models: `python -m molora_jax.tools VERB`.

`arguments` describes every verb without importing what it needs; `VERB.run(args)` does the work.
"""
