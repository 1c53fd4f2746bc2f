"""AWS Trainium and Inferentia: a bucket is an HLO module, and a NEFF where neuronx-cc is installed."""
