"""Which devices communicate, and through which memory.

partition, topology    how devices are divided, and how they are linked
key_value_store        what the processes of a mesh tell each other
rendezvous             where they meet, once; log_line says what came of it
communicator           what the groups of a partition communicate through
peer_buffer            memory of the peers for kernels of the program
"""
