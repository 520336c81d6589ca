"""MKOR: a malicious server's parameters that make large batches readable."""
