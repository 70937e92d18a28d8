"""Environments as launchers give them to their tasks, recorded."""

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_RESTART_COUNT": "1",
}

OPENMPI_4 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "OMPI_MCA_ess_base_jobid": "2563768321",
    "PMIX_NAMESPACE": "2563768321",
    "PMIX_RANK": "1",
}

OPENMPI_5 = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node7-1234@1",
    "PMIX_RANK": "2",
}

JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "JOB_INDEX": "2",
    "PODS_PER_JOB": "4",
    "JOBS": "3",
    "JOB_ID": "train",
    "RESTART_ATTEMPT": "5",
    "FIRST_HOST": "h",
}

MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "3",
    "PMI_FD": "8",
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "3",
    "MPI_LOCALRANKID": "1",
}

TORCHRUN = {
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}

LWS = {
    "LWS_LEADER_ADDRESS": "train-0.train.default",
    "LWS_GROUP_SIZE": "4",
    "LWS_WORKER_INDEX": "1",
}

JAX = {
    "JAX_COORDINATOR_ADDRESS": "h:1",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
}
