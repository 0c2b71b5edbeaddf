"""What goes wrong in mixed precision, as records that any library can be held against.

adapter.py    the few names a library must give, and what a record is
tools.py      tensors, planted faults and measurements that the records share
diagnosed.py  what code written by hand gives in 16 bits, and what the library says of it
loops.py      the loops of the manuals
ledger.py     the faults that the records were made from, and the kinds
registry.py   all records
table.py      the published table and its page
narrow.py     weights that are 16 bits wide
constants.py  constants that do not fit 16 bits: masks, eps, clamps
range.py      products, squares and sums beyond the range of fp16
adapters16.py small parts trained in 16 bits
scaling.py    the loss scale: start, growth, collapse, resume
calibration.py finding the scale in the first backward pass, and following it
replays.py    backward passes that are run again at a lower scale
losses.py     what is given to scale() and update()
orders.py     steps: unscale, clip and edit in every order
calls.py      steps: calls that are missing, too many or on the wrong object
legitimate.py steps: what is right and must go on working
habits.py     steps: habits of loops around the scaler
several.py    steps: several optimizers, losses and ranks
windows.py    steps: accumulation
closures.py   steps: closures, kinds of optimizer and kinds of gradient
following.py  what must follow a step: schedules, averages, hooks
buffers.py    running statistics that a bad batch touches
settings.py   numbers that ruin weights and states
sums.py       sums, averages and statistics in 16 bits
tables.py     integers, positions and tables in 16 bits
agreement.py  decisions from 16-bit numbers
casts.py      what runs in which dtype inside a block
islands.py    fp32 islands, nesting, decorators
bindings.py   the weight cache, recompute, threads, custom functions
transforms.py function transforms, higher derivatives, less usual layers
mismatch.py   two dtypes meet
resume.py     saving, loading and resuming
recompute.py  passes run again, compiled, in parts
doors.py      accelerators and trainers
cost.py       memory and casts
display.py    values that leave the model
ours.py       halfstep as a library to hold against them
stock.py      torch, Accelerate and Transformers as the control, and a careless library as the second one
libraries/    one adapter per library of the published table

`python -m conformance` in the folder `tests` measures the table; `make conformance` also writes docs/conformance.md.
"""
