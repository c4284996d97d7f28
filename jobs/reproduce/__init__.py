"""The paper's experiments, run through the ordinary ways in and out, beside the paper's own figures."""
