"""Every order of three processes' sync point: notices, a death, a late comer, who leaves."""
