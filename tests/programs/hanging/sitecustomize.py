"""Lets a program that knows nothing of it hang at a signal, as where a store does not answer: its
main thread waits for ever, and its other threads go on.
"""

import signal
import threading


def wait_for_a_store_that_never_answers(*_: object) -> None:
    threading.Event().wait()


signal.signal(signal.SIGUSR1, wait_for_a_store_that_never_answers)
