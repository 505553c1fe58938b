"""GEMMs of the fused FFN for Hopper in Gluon, persistent over the tiles, whose epilogues run beside the products.

A program has two warpgroups that multiply, a producer that fills their operand stages, and an epilogue. At the end of
a tile the warpgroups write their sums to shared memory and start the next tile (`main_loop`). The epilogue reads the
sums from there, reads its other inputs, and writes the results (`epilogue`).
"""
