//! Notifications to systemd: ready, alive, stopping. Alive is sent only while every thread makes progress.

use std::time::Duration;

use sd_notify::NotifyState;

use crate::health::Health;

fn tell(states: &[NotifyState<'_>]) {
    // Without systemd nobody listens.
    if let Err(e) = sd_notify::notify(states) {
        tracing::debug!(error = %e, "could not notify systemd");
    }
}

pub(crate) fn ready() {
    tell(&[NotifyState::Ready, NotifyState::Status("accepting checkpoints")]);
}

pub(crate) fn stopping(why: &str) {
    tell(&[NotifyState::Stopping, NotifyState::Status(why)]);
}

/// Tells systemd's watchdog that the service is alive, as long as no thread is stalled.
pub(crate) async fn watchdog(health: std::sync::Arc<Health>) {
    let Some(limit) = sd_notify::watchdog_enabled() else { return };
    let pause = (limit / 2).max(Duration::from_millis(100));
    loop {
        let stalled = health.stalled();
        match stalled.is_empty() {
            true => tell(&[NotifyState::Watchdog]),
            false => tracing::error!(?stalled, "not notifying the watchdog: threads have stalled"),
        }
        tokio::time::sleep(pause).await;
    }
}
