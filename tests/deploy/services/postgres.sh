# Makes the database at the first start, by the variables of PostgreSQL's public image; then starts the server.
set -eu
if ! [ -e "$PGDATA/PG_VERSION" ]; then
    echo "$POSTGRES_PASSWORD" > /tmp/password
    initdb --username="$POSTGRES_USER" --pwfile=/tmp/password --auth-host=scram-sha-256 --encoding=UTF8 --locale=C.UTF-8
    rm /tmp/password
    echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
    echo "CREATE DATABASE $POSTGRES_DB" | postgres --single -j postgres
fi
exec "$@" -c listen_addresses='*'
