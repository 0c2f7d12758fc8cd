"""Studies: a question, asked over many setups by one command, and the page of docs that it writes."""
