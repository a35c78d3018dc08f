"""What a call of the program ends with."""

OK, FAILED, WRONG_CALL, INTERRUPTED = 0, 1, 2, 130
