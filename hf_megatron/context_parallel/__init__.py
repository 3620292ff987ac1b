"""Context parallelism: the ranks split every sequence, and attention sees all of its tokens.

| file | contents |
|---|---|
| `load_balancing.py` | which tokens a rank holds: zigzag, per document, hierarchical |
| `token_exchange.py` | collectives over tokens: gather, ring exchange, all-to-all between tokens and heads |
| `masks.py` | which keys a query sees, as intervals, and the attention blocks that follow from them |
| `kernels.py` | attention of one block, with its logsumexp |
| `attention.py` | attention over the full sequence |
| `mask_specs.py` | conversion of transformers' mask functions |
| `attention_dispatch.py` | wrappers of transformers' attention and mask functions |
| `sequence_split.py` | where a sequence is split and gathered |
"""
