//! Notices that the machine or the job is about to end: from the instance's metadata and by signals.

use std::sync::Arc;
use std::time::Duration;

use crate::health::Health;
use crate::imds::{Imds, NoAnswer};
use crate::queue::{Mode, SharedQueue};

/// How often the metadata is polled, as AWS recommends.
const POLL: Duration = Duration::from_secs(5);

const ACTION: &str = "/latest/meta-data/spot/instance-action";
const REBALANCE: &str = "/latest/meta-data/events/recommendations/rebalance";

/// Polls forever for a notice that the instance will be interrupted. After one, the newest
/// checkpoint goes first.
pub(crate) async fn watch_spot(imds: Imds, health: Arc<Health>, queue: SharedQueue) {
    let mut reachable = true;
    loop {
        match imds.get(ACTION).await {
            Ok(text) => notice(&health, &queue, "spot", &described(&text)),
            Err(NoAnswer::Absent(_)) => {
                reachable = true;
                // An earlier hint, which may come to nothing.
                if let Ok(text) = imds.get(REBALANCE).await {
                    health.interrupted("rebalance", &described(&text));
                }
            }
            Err(e) if reachable => {
                tracing::warn!(error = %e, "cannot poll the instance metadata: a spot interruption would go unnoticed");
                reachable = false;
            }
            Err(_) => {}
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Records an interruption, and puts the newest checkpoint first.
pub(crate) fn notice(health: &Health, queue: &SharedQueue, source: &'static str, detail: &str) {
    if queue.mode() == Mode::Steady {
        tracing::warn!(
            source,
            detail,
            "an interruption was announced: uploading the newest checkpoint first"
        );
    }
    health.interrupted(source, detail);
    queue.set_mode(Mode::Urgent);
}

/// A summary of a notice, from its known members only: `terminate at 2026-01-01T00:00:00Z`.
fn described(text: &str) -> String {
    let value: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
    let word = |name: &str| value[name].as_str().map(|w| w.chars().take(40).collect::<String>());
    match (word("action"), word("time").or_else(|| word("noticeTime"))) {
        (Some(action), Some(time)) => format!("{action} at {time}"),
        (None, Some(time)) => format!("notice of {time}"),
        (Some(action), None) => action,
        (None, None) => "unrecognized notice".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::described;

    #[test]
    fn notices_are_described_by_what_is_known_of_them() {
        let text = r#"{"action":"terminate","time":"2026-11-23T10:00:00Z"}"#;
        assert_eq!(described(text), "terminate at 2026-11-23T10:00:00Z");
        assert_eq!(described(r#"{"noticeTime":"t"}"#), "notice of t");
        assert_eq!(described("<html>"), "unrecognized notice");
        assert!(described(&format!(r#"{{"action":"{}"}}"#, "a".repeat(500))).len() < 50);
    }
}
