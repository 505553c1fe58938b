"""GEMMs of the fused FFN for Hopper in Gluon, persistent over the tiles, whose epilogues run beside the products.

A program has two warpgroups that multiply, a producer that fills their ring of operand stages, and a finisher. At the
end of a tile the warpgroups leave their sums in shared memory and go on with the next (`main_loop`); the finisher takes
them from there, reads what else it needs, and writes the results (`sums`).
"""
