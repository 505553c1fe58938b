"""The expert back end `auto`: for each shape, the kernels that a table says are fastest on this machine.

**What is chosen.** There are two units. A *grouped GEMM* (forward, the gradient of the rows, the gradient of the
matrices) gets a plan: one back end for all three products, or one for each. A *whole expert FFN* gets a back end,
because fused back ends cannot be divided into GEMMs; one of the choices is the shared FFN around the planned GEMMs.

**By what.** The table holds seconds by the clock, in a loop that launches forward and backward again and again, as
training does. So the host's launch cost counts where the host is the limit, and the device's time where that is. The
host is therefore part of the table's identity, beside the card, torch, Triton, and the sources of our kernels. A table
of anything else is never read. Beside the clock's seconds stand the device's. They decide between plans that are level
by the clock, as most are where the host is the limit.

**For which shapes.** Numbers of experts, widths, dtype and layout must be equal. The number of rows falls into a class:
powers of the square root of two. A class that was not measured takes the plan of the nearest one that was, at most two
octaves away; beyond that torch's own back end runs.

**Loads.** The host does not know how many rows each expert gets, and asking would wait for the device. So each class
is measured with even loads and with Zipf(1) loads. A plan that is slower than torch's own under either is out. The rest
are compared by their worse ratio to the fastest, and the least one is taken (minimax regret). A plan that is not faster
than torch's own by more than the noise of the measurement leaves the place to torch's own.

**When it is measured.** A class is measured once: by `prepare`, or at its first use if `BEXP_MEASURE_EXPERTS` is 1, as
a worker sets it for its profilers. A trainer's process only reads. Nothing is measured while a CUDA graph is captured
or torch.compile traces a graph. Apart from that measurement nothing waits for the device. A process keeps the plan that
it has used first, so that recomputation runs the kernels of the forward.

`loop` and `bmm` wait for the device in every forward, so they are never chosen for a whole FFN. A grouped GEMM whose
caller has the experts' counts on the host, all equal, is measured on its own, and `bmm` is one of its plans: it needs
no padding then and does not wait.
"""
