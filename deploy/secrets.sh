#!/usr/bin/env bash
# Makes the secrets of a deployment in a folder: the hash key that gateway and worker share, one tenant's API key, and
# settings.toml with the digest of it. With a name for the workers, which their certificate then holds, an authority and
# certificates for TLS between gateways and workers too.
#
#   deploy/secrets.sh FOLDER [WORKER-NAME]
#
# What is there is kept: a hash key that changes empties every cache, a changed API key locks its tenant out.
set -euo pipefail
umask 077

folder=${1:?usage: deploy/secrets.sh FOLDER [WORKER-NAME]}
worker_name=${2:-}
prefixgate=${PREFIXGATE:-prefixgate}
[[ $prefixgate != */* ]] || prefixgate=$(realpath "$prefixgate") # it is called from another folder
mkdir -p "$folder"
cd "$folder"

if [ ! -e hash.key ]; then
    made=$(openssl rand -hex 32) # whole before there is a file, as that would be kept
    echo "$made" > hash.key
fi

if [ ! -e settings.toml ]; then
    made=$("$prefixgate" key)
    sed -n 's/^ *\(pg-[A-Za-z0-9_-]*\)$/\1/p' <<< "$made" | tr -d '\n' > api.key
    cat > settings.toml <<SETTINGS
# Read by the gateway and the worker. Every key: docs/configuration.md. Tenants and limits change without a restart.
[tenants.application]
api_keys = ["$(sed -n '/"sha256:/{s/.*"\(sha256:[0-9a-f]*\)".*/\1/p;q}' <<< "$made")"]
SETTINGS
fi

quietly() { # openssl tells how it makes keys; that is news only when it fails
    local said
    said=$("$@" 2>&1) || { echo "$said" >&2; exit 1; }
}

certificate() { # NAME COMMON-NAME ALTERNATIVE-NAME
    [ ! -e "$1.crt" ] || return 0
    printf 'subjectAltName=DNS:%s\nbasicConstraints=CA:FALSE\n' "$3" > extensions
    quietly openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "$1.key" -subj "/CN=$2" \
        -out request
    quietly openssl x509 -req -in request -CA authority.crt -CAkey authority.key -set_serial "0x$(openssl rand -hex 16)" \
        -days 365 -extfile extensions -out "$1.crt"
    rm request extensions
}

if [ -n "$worker_name" ]; then
    [ -e authority.crt ] || quietly openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 \
        -keyout authority.key -subj '/CN=prefixgate authority' -addext 'keyUsage=critical,keyCertSign,cRLSign' \
        -out authority.crt
    certificate worker prefixgate-worker "$worker_name"
    certificate gateway prefixgate-gateway prefixgate-gateway
fi

echo "secrets are in $PWD; clients call with the key in api.key"
