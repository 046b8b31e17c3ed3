"""Randomised fault schedules over real worker processes, and a checker of every promise.

plan    what a round does, drawn from its seed alone
line    the TCP line between a client and the server, with faults
fleet   the worker processes
faults  carries a planned fault out
load    the producers: submits, aborts, readers
world   all that stands: server, lines, fleet, producers
settle  after the faults: everything ends, nobody idles
check   what must hold of every job, reader and key
gauge   processor time and memory of processes
main    the command
"""
