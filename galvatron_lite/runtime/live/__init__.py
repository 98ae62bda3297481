"""What training shows, and writes into the folder of its run, beside what was predicted."""
