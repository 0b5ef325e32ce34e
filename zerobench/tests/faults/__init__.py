"""What zerobench does when ranks, parents, disks, networks and clocks fail: rows of faults, and a driver that counts."""
