//! Metrics, in the format that Prometheus reads.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use crate::record::State;
use crate::status::Status;

/// A label value that is a word of this program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Word(&'static str);

impl EncodeLabelValue for Word {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> fmt::Result {
        self.0.encode(encoder)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: Word,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Stage {
    stage: Word,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InState {
    state: Word,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Tier {
    tier: Word,
}

/// All metrics. No label has a value that comes from outside.
pub(crate) struct Metrics {
    registry: Registry,
    accepted: Counter,
    refused: Family<Kind, Counter>,
    bytes: Family<Stage, Counter>,
    compress: Histogram,
    upload: Histogram,
    restore: Family<Tier, Histogram>,
    /// Checkpoints that were damaged.
    pub verify_failures: Counter,
    errors: Family<Kind, Counter>,
    checkpoints: Family<InState, Gauge>,
    queued: Gauge,
    free: Gauge,
    step: Gauge,
    durable_at: Gauge<f64, AtomicU64>,
    lag: Gauge<f64, AtomicU64>,
    reachable: Gauge,
    ready: Gauge,
    entitled: Gauge,
    interrupted_at: Gauge<f64, AtomicU64>,
}

fn times() -> Histogram {
    Histogram::new(exponential_buckets(0.01, 4.0, 9))
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("s4w_runner");
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "Version of the program", build);
        let restore = Family::new_with_constructor(times as fn() -> Histogram);
        let metrics = Self {
            accepted: Counter::default(),
            refused: Family::default(),
            bytes: Family::default(),
            compress: times(),
            upload: times(),
            restore,
            verify_failures: Counter::default(),
            errors: Family::default(),
            checkpoints: Family::default(),
            queued: Gauge::default(),
            free: Gauge::default(),
            step: Gauge::default(),
            durable_at: Gauge::default(),
            lag: Gauge::default(),
            reachable: Gauge::default(),
            ready: Gauge::default(),
            entitled: Gauge::default(),
            interrupted_at: Gauge::default(),
            registry: Registry::default(),
        };
        let r = &mut registry;
        let m = &metrics;
        r.register("accepted", "Accepted checkpoints", m.accepted.clone());
        r.register("refused", "Refused submissions", m.refused.clone());
        let help = "Bytes of checkpoints, before and after compression";
        r.register_with_unit("checkpoint", help, Unit::Bytes, m.bytes.clone());
        let help = "Time to compress and verify a checkpoint";
        r.register_with_unit("compress_duration", help, Unit::Seconds, m.compress.clone());
        let help = "Time to upload a checkpoint and list it";
        r.register_with_unit("upload_duration", help, Unit::Seconds, m.upload.clone());
        let help = "Time to restore a checkpoint, by where it came from";
        r.register_with_unit("restore_duration", help, Unit::Seconds, m.restore.clone());
        let help = "Damaged checkpoints";
        r.register("verify_failures", help, m.verify_failures.clone());
        r.register("errors", "Failures, each of them retried", m.errors.clone());
        let help = "Checkpoints in the journal, by state";
        r.register("checkpoints", help, m.checkpoints.clone());
        let help = "Bytes on the local drive that hold checkpoints that are not durable";
        r.register_with_unit("queue", help, Unit::Bytes, m.queued.clone());
        let help = "Free bytes on the local drive";
        r.register_with_unit("staging_free", help, Unit::Bytes, m.free.clone());
        r.register("last_durable_step", "The newest durable step", m.step.clone());
        let help = "Time when a checkpoint last became durable";
        r.register_with_unit("last_durable_timestamp", help, Unit::Seconds, m.durable_at.clone());
        let help = "Age of the oldest checkpoint that is not durable; 0 if there is none";
        r.register_with_unit("durable_lag", help, Unit::Seconds, m.lag.clone());
        r.register("store_reachable", "Whether the store answers", m.reachable.clone());
        r.register("ready", "Whether /readyz reports ready", m.ready.clone());
        r.register("entitled", "Whether the entitlement was granted", m.entitled.clone());
        let help = "Time when an interruption was announced; 0 if none was";
        let unit = Unit::Seconds;
        r.register_with_unit("interruption_timestamp", help, unit, m.interrupted_at.clone());
        for state in State::ALL {
            drop(m.checkpoints.get_or_create(&InState { state: Word(state.name()) }));
        }
        Self { registry, ..metrics }
    }
}

impl Metrics {
    /// A submission was accepted.
    pub(crate) fn accepted(&self) {
        self.accepted.inc();
    }

    /// A submission was refused.
    pub(crate) fn refused(&self, kind: &'static str) {
        self.refused.get_or_create(&Kind { kind: Word(kind) }).inc();
    }

    /// Something failed.
    pub(crate) fn error(&self, kind: &'static str) {
        self.errors.get_or_create(&Kind { kind: Word(kind) }).inc();
    }

    /// A checkpoint was compressed.
    pub(crate) fn compressed(&self, raw: u64, stored: u64, time: Duration) {
        self.bytes.get_or_create(&Stage { stage: Word("raw") }).inc_by(raw);
        self.bytes.get_or_create(&Stage { stage: Word("stored") }).inc_by(stored);
        self.compress.observe(time.as_secs_f64());
    }

    /// A checkpoint was uploaded and listed.
    pub(crate) fn uploaded(&self, time: Duration) {
        self.upload.observe(time.as_secs_f64());
    }

    /// A checkpoint was restored.
    pub(crate) fn restored(&self, tier: &'static str, time: Duration) {
        self.restore.get_or_create(&Tier { tier: Word(tier) }).observe(time.as_secs_f64());
    }

    /// The current metrics, as text.
    #[must_use]
    pub(crate) fn text(&self, status: &Status) -> String {
        let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        for (state, count) in &status.states {
            let gauge = self.checkpoints.get_or_create(&InState { state: Word(state) });
            gauge.set(number(*count));
        }
        let seconds = |ms: Option<i64>| ms.map_or(0.0, |ms| ms as f64 / 1000.0);
        self.queued.set(number(status.queued_bytes));
        self.free.set(number(status.staging_free_bytes));
        self.step.set(status.last_durable.as_ref().map_or(0, |d| number(d.step)));
        self.durable_at.set(seconds(status.last_durable_ms));
        self.lag.set(status.durable_lag_seconds);
        self.reachable.set(i64::from(status.store.reachable == Some(true)));
        self.ready.set(i64::from(status.ready));
        self.entitled.set(i64::from(status.entitled));
        self.interrupted_at.set(seconds(status.interruption.as_ref().map(|i| i.noticed_ms)));
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
