"""GEMMs of the fused FFN for Hopper in Gluon, persistent over the tiles, whose epilogues run beside the products.

A program has two warpgroups that multiply, a producer that fills their operand stages, and an epilogue. At the
end of a tile the warpgroups leave their sums in shared memory and go on with the next (`main_loop`); the epilogue takes
them from there, reads what else it needs, and writes the results (`epilogue`).
"""
