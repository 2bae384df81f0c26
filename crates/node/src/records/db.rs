//! Records in SQLite.
//!
//! Write-ahead log; ordinary writes are `synchronous=NORMAL`: a crash of the server loses nothing, a power cut may lose
//! the last moments, in which case the machines they speak of are gone too. What must survive a power cut (a finished
//! pause, a finished build, a key) goes through a second connection with `synchronous=FULL`, which syncs the log up to
//! and including that write.

use super::{BuildRecord, Record, TemplateRecord};
use crate::model::{BuildId, SandboxId, State, TemplateId};
use jiff::Timestamp;
use serde::{Serialize, de::DeserializeOwned};
use sqlx::{
    AssertSqlSafe, Row, SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use std::{path::Path, time::Duration};

/// Each entry takes the database from its index to the next version. Never changed once released, only added to.
const MIGRATIONS: &[&str] = &["
    CREATE TABLE sandboxes (
        id TEXT PRIMARY KEY, team TEXT NOT NULL, state TEXT NOT NULL, template TEXT NOT NULL, build TEXT NOT NULL,
        started_at INTEGER NOT NULL, ended_at INTEGER, idempotency_key TEXT, detail TEXT NOT NULL
    ) STRICT;
    CREATE INDEX sandboxes_by_team ON sandboxes (team, started_at);
    CREATE UNIQUE INDEX sandboxes_by_key ON sandboxes (team, idempotency_key) WHERE idempotency_key IS NOT NULL;
    CREATE TABLE templates (id TEXT PRIMARY KEY, team TEXT NOT NULL, detail TEXT NOT NULL) STRICT;
    CREATE TABLE aliases (
        team TEXT NOT NULL, name TEXT NOT NULL, template TEXT NOT NULL REFERENCES templates (id) ON DELETE CASCADE,
        PRIMARY KEY (team, name)
    ) STRICT;
    CREATE TABLE builds (
        id TEXT PRIMARY KEY, template TEXT NOT NULL REFERENCES templates (id) ON DELETE CASCADE,
        status TEXT NOT NULL, detail TEXT NOT NULL
    ) STRICT;
    CREATE TABLE keys (
        sha256 BLOB PRIMARY KEY, team TEXT NOT NULL, name TEXT NOT NULL, created_at INTEGER NOT NULL
    ) STRICT;
"];

/// Why a record could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum DbError {
    /// SQLite's own words.
    #[error("the node's records: {0}")]
    Sql(#[from] sqlx::Error),
    /// A later version wrote them.
    #[error("the node's records have schema version {found}, this program knows {}: update it", MIGRATIONS.len())]
    TooNew {
        /// Version found.
        found: i64,
    },
    /// A record isn't what it should be.
    #[error("a record in the table '{table}' can't be read: {reason}")]
    Damaged {
        /// Where.
        table: &'static str,
        /// What is wrong.
        reason: String,
    },
}

type Result<T, E = DbError> = std::result::Result<T, E>;

/// The open database.
#[derive(Clone)]
pub(crate) struct Db {
    quick: SqlitePool,
    durable: SqlitePool,
}

impl Db {
    /// Opens or creates the database file and brings it to the present schema.
    pub(crate) async fn open(path: &Path) -> Result<Self> {
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .foreign_keys(true)
            .journal_mode(SqliteJournalMode::Wal)
            .busy_timeout(Duration::from_secs(10));
        // One connection each: SQLite has one writer anyway, and waiting in the pool is cheaper than in busy loops.
        let pool = |synchronous| {
            SqlitePoolOptions::new()
                .max_connections(1)
                .acquire_timeout(Duration::from_secs(15))
                .idle_timeout(None)
                .max_lifetime(None)
                .connect_with(options.clone().synchronous(synchronous))
        };
        let db = Self {
            durable: pool(SqliteSynchronous::Full).await?,
            quick: pool(SqliteSynchronous::Normal).await?,
        };
        db.migrate().await?;
        Ok(db)
    }

    async fn migrate(&self) -> Result<()> {
        let found: i64 = sqlx::query_scalar("PRAGMA user_version").fetch_one(&self.durable).await?;
        let done = usize::try_from(found).map_err(|_| DbError::TooNew { found })?;
        if done > MIGRATIONS.len() {
            return Err(DbError::TooNew { found });
        }
        for (index, migration) in MIGRATIONS.iter().enumerate().skip(done) {
            let mut transaction = self.durable.begin().await?;
            sqlx::raw_sql(*migration).execute(&mut *transaction).await?;
            // A pragma takes no parameters; the number is ours.
            let version = AssertSqlSafe(format!("PRAGMA user_version = {}", index + 1));
            sqlx::query(version).execute(&mut *transaction).await?;
            transaction.commit().await?;
        }
        Ok(())
    }

    /// Writes a sandbox.
    pub(crate) async fn save(&self, record: &Record) -> Result<()> {
        Self::save_to(&self.quick, record).await
    }

    /// Writes a sandbox so that a power cut doesn't undo it.
    pub(crate) async fn save_durably(&self, record: &Record) -> Result<()> {
        Self::save_to(&self.durable, record).await
    }

    async fn save_to(pool: &SqlitePool, record: &Record) -> Result<()> {
        let sandbox = &record.sandbox;
        sqlx::query(
            "INSERT INTO sandboxes (id, team, state, template, build, started_at, ended_at, idempotency_key, detail)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
             ON CONFLICT (id) DO UPDATE SET state = excluded.state, ended_at = excluded.ended_at,
                idempotency_key = excluded.idempotency_key, detail = excluded.detail",
        )
        .bind(sandbox.id.as_str())
        .bind(&sandbox.team)
        .bind(word(&sandbox.state, "sandboxes")?)
        .bind(sandbox.template.as_str())
        .bind(sandbox.build.to_string())
        .bind(sandbox.started_at.as_microsecond())
        .bind(sandbox.tombstone.as_ref().map(|tombstone| tombstone.at.as_microsecond()))
        .bind(&record.idempotency_key)
        .bind(encode(record, "sandboxes")?)
        .execute(pool)
        .await?;
        Ok(())
    }

    /// All sandboxes, tombstones included.
    pub(crate) async fn sandboxes(&self) -> Result<Vec<Record>> {
        let rows = sqlx::query("SELECT detail FROM sandboxes").fetch_all(&self.quick).await?;
        rows.iter().map(|row| decode(row.try_get(0)?, "sandboxes")).collect()
    }

    /// Forgets tombstones older than `before` and all but the newest `keep`. Returns the ids forgotten.
    pub(crate) async fn purge(&self, before: Timestamp, keep: usize) -> Result<Vec<SandboxId>> {
        let rows = sqlx::query(
            "DELETE FROM sandboxes WHERE state = ? AND (ended_at < ? OR id IN (
                SELECT id FROM sandboxes WHERE state = ? ORDER BY ended_at DESC LIMIT -1 OFFSET ?))
             RETURNING id",
        )
        .bind(word(&State::Dead, "sandboxes")?)
        .bind(before.as_microsecond())
        .bind(word(&State::Dead, "sandboxes")?)
        .bind(i64::try_from(keep).unwrap_or(i64::MAX))
        .fetch_all(&self.quick)
        .await?;
        rows.iter()
            .map(|row| {
                let id: String = row.try_get(0)?;
                id.parse().map_err(|error: crate::model::IdError| DbError::Damaged {
                    table: "sandboxes",
                    reason: error.to_string(),
                })
            })
            .collect()
    }

    /// Writes a template and its names, which may take a name from another template of the team.
    pub(crate) async fn save_template(&self, record: &TemplateRecord) -> Result<()> {
        let mut transaction = self.durable.begin().await?;
        sqlx::query(
            "INSERT INTO templates (id, team, detail) VALUES (?, ?, ?)
             ON CONFLICT (id) DO UPDATE SET detail = excluded.detail",
        )
        .bind(record.id.as_str())
        .bind(&record.team)
        .bind(encode(record, "templates")?)
        .execute(&mut *transaction)
        .await?;
        sqlx::query("DELETE FROM aliases WHERE template = ?")
            .bind(record.id.as_str())
            .execute(&mut *transaction)
            .await?;
        for name in &record.names {
            sqlx::query(
                "INSERT INTO aliases (team, name, template) VALUES (?, ?, ?)
                 ON CONFLICT (team, name) DO UPDATE SET template = excluded.template",
            )
            .bind(&record.team)
            .bind(name)
            .bind(record.id.as_str())
            .execute(&mut *transaction)
            .await?;
        }
        transaction.commit().await?;
        Ok(())
    }

    /// Writes how often and when a template was used last; losing the latest count does no harm.
    pub(crate) async fn touch_template(&self, record: &TemplateRecord) -> Result<()> {
        sqlx::query("UPDATE templates SET detail = ? WHERE id = ?")
            .bind(encode(record, "templates")?)
            .bind(record.id.as_str())
            .execute(&self.quick)
            .await?;
        Ok(())
    }

    /// All templates.
    pub(crate) async fn templates(&self) -> Result<Vec<TemplateRecord>> {
        let rows = sqlx::query("SELECT detail FROM templates").fetch_all(&self.quick).await?;
        rows.iter().map(|row| decode(row.try_get(0)?, "templates")).collect()
    }

    /// Forgets a template with its builds and names.
    pub(crate) async fn forget_template(&self, id: &TemplateId) -> Result<()> {
        sqlx::query("DELETE FROM templates WHERE id = ?").bind(id.as_str()).execute(&self.durable).await?;
        Ok(())
    }

    /// Writes a build.
    pub(crate) async fn save_build(&self, record: &BuildRecord) -> Result<()> {
        sqlx::query(
            "INSERT INTO builds (id, template, status, detail) VALUES (?, ?, ?, ?)
             ON CONFLICT (id) DO UPDATE SET status = excluded.status, detail = excluded.detail",
        )
        .bind(record.id.to_string())
        .bind(record.template.as_str())
        .bind(word(&record.status, "builds")?)
        .bind(encode(record, "builds")?)
        .execute(&self.durable)
        .await?;
        Ok(())
    }

    /// All builds.
    pub(crate) async fn builds(&self) -> Result<Vec<BuildRecord>> {
        let rows = sqlx::query("SELECT detail FROM builds").fetch_all(&self.quick).await?;
        rows.iter().map(|row| decode(row.try_get(0)?, "builds")).collect()
    }

    /// Forgets a build.
    pub(crate) async fn forget_build(&self, id: &BuildId) -> Result<()> {
        sqlx::query("DELETE FROM builds WHERE id = ?").bind(id.to_string()).execute(&self.durable).await?;
        Ok(())
    }

    /// Adds a key by its hash.
    pub(crate) async fn add_key(&self, sha256: [u8; 32], team: &str, name: &str) -> Result<()> {
        sqlx::query("INSERT INTO keys (sha256, team, name, created_at) VALUES (?, ?, ?, ?)")
            .bind(sha256.as_slice())
            .bind(team)
            .bind(name)
            .bind(Timestamp::now().as_microsecond())
            .execute(&self.durable)
            .await?;
        Ok(())
    }

    /// All keys: hash and team.
    pub(crate) async fn keys(&self) -> Result<Vec<([u8; 32], String)>> {
        let rows = sqlx::query("SELECT sha256, team FROM keys").fetch_all(&self.quick).await?;
        rows.iter()
            .map(|row| {
                let sha256: Vec<u8> = row.try_get(0)?;
                let sha256 = sha256.try_into().map_err(|_| DbError::Damaged {
                    table: "keys",
                    reason: "a hash isn't 32 bytes long".into(),
                })?;
                Ok((sha256, row.try_get(1)?))
            })
            .collect()
    }

    /// Whether it answers.
    pub(crate) async fn ping(&self) -> Result<()> {
        sqlx::query("SELECT 1").execute(&self.quick).await?;
        Ok(())
    }

    /// Writes everything out and closes.
    pub(crate) async fn close(&self) {
        self.quick.close().await;
        self.durable.close().await;
    }
}

fn encode<T: Serialize>(record: &T, table: &'static str) -> Result<String> {
    serde_json::to_string(record).map_err(|error| DbError::Damaged { table, reason: error.to_string() })
}

fn decode<T: DeserializeOwned>(text: &str, table: &'static str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| DbError::Damaged { table, reason: error.to_string() })
}

/// A state or status as its word in the API.
fn word<T: Serialize>(value: &T, table: &'static str) -> Result<String> {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => Ok(word),
        other => Err(DbError::Damaged { table, reason: format!("{other:?} is not a word") }),
    }
}
