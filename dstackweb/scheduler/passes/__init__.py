"""The placement pass: reads what waits, decides with `placement`, writes the result; also plans and explanations."""
