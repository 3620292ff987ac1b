"""Context parallelism: every rank holds some tokens of each row, and attention sees all of them.

| file | holds |
|---|---|
| `order.py` | which tokens a rank holds: zigzag, by document, in a hierarchy |
| `exchange.py` | tokens that change ranks: gathered, sent round a ring, exchanged for heads |
| `masks.py` | which keys a query sees, as intervals, and the blocks that follow from them |
| `kernels.py` | attention of one block, with the logarithm of its sum |
| `attention.py` | attention over all of them |
| `descriptions.py` | transformers' functions of masks, read |
| `dispatch.py` | what stands before transformers' attention and masks |
| `stack.py` | where a row is cut and joined |
"""
