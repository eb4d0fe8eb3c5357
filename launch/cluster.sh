#!/usr/bin/env bash
# Run a command with the NCCL and XLA settings of a cluster:  launch/cluster.sh CLUSTER COMMAND ...
#
# CLUSTER is one of those below. NCCL finds most by itself; these are what the makers of each network ask for beside that.
# Settings that you make yourself count. None of these clusters was at hand to measure them on.
set -euo pipefail
if [[ $# -lt 2 ]]; then
    echo "usage: launch/cluster.sh $(sed -n 's/^\([a-z0-9-]*\)) .*/\1/p' "${BASH_SOURCE[0]}" | paste -sd '|') COMMAND ..." >&2
    exit 2
fi
cluster=$1
shift
setting() { # NAME VALUE: unless NAME is set already
    export "$1=${!1-$2}"
}
profile() { # FILE: settings that the cluster's images bring
    if [[ ! -r $1 ]]; then
        echo "error: launch/cluster.sh $cluster: $1 is not here; use the image that brings it, or another CLUSTER" >&2
        exit 2
    fi
    set +u
    # shellcheck source=/dev/null
    source "$1"
    set -u
}

case $cluster in
one-node) ;; # NVLink or PCIe alone
infiniband) # ConnectX adapters, one for each GPU; RoCE too
    setting NCCL_IB_HCA mlx5
    ;;
ethernet) # sockets alone, fast ones
    setting NCCL_IB_DISABLE 1
    setting NCCL_SOCKET_NTHREADS 4
    setting NCCL_NSOCKS_PERTHREAD 4
    ;;
aws-efa) # P4d to P5en; the image has libfabric and aws-ofi-nccl in /opt/amazon
    setting FI_PROVIDER efa
    setting FI_EFA_USE_DEVICE_RDMA 1
    setting NCCL_SOCKET_IFNAME ^docker,lo,veth
    export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    ;;
azure-nd-h100) # what Azure's HPC images have in /etc/nccl.conf, which a container does not see
    setting NCCL_IB_PCI_RELAXED_ORDERING 1
    setting NCCL_TOPO_FILE /opt/microsoft/ndv5/topo.xml
    setting NCCL_IGNORE_CPU_AFFINITY 1
    setting NCCL_SOCKET_IFNAME eth0
    ;;
gcp-a3-mega) # GPUDirect-TCPXO
    setting NCCL_LIB_DIR /usr/local/nvidia/lib64
    setting NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY /dev/aperture_devices
    profile "$NCCL_LIB_DIR/nccl-env-profile.sh"
    ;;
gcp-a3-ultra) # GPUDirect RDMA
    profile /usr/local/gib/scripts/set_nccl_env.sh
    ;;
*)
    echo "error: launch/cluster.sh: no cluster '$cluster'; launch/cluster.sh alone lists them" >&2
    exit 2
    ;;
esac
if [[ $cluster != one-node ]]; then
    # A process whose peer is gone must end before the watchdog's limit (training.watch.seconds), not wait for ever.
    export XLA_FLAGS="--xla_gpu_nccl_terminate_on_error=true ${XLA_FLAGS:-}"
fi
exec "$@"
