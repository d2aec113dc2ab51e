# SPDX-License-Identifier: Apache-2.0
"""linear.mma_chain/1 over a K that is sharded on several GPUs, with the bits of one GPU that holds all of it.

Three schedules, free of bits. `chain`: the fp32 accumulator goes from rank to rank through symmetric memory, tile by tile, in
one launch a rank. `rows`: ranks exchange rows and weights, and each walks the whole K for a block of rows. `columns`: inputs are
gathered, and each walks the whole K for the columns whose weights it holds. `table.json` says which serves what.
"""
