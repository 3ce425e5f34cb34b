//! `probe`, `break-lease`: who may write to a store.

use s4weights::redact_url;
use s4weights::store::{CheckpointStore, Mode, ProbeReport, StoreError, StoreOptions};

use super::StoreArgs;
use crate::error::{Failure, Result};
use crate::{say, to_json};

/// The meaning of a store's mode.
pub(crate) fn writers(mode: Mode) -> &'static str {
    match mode {
        Mode::Many => "any number at once",
        Mode::Single => "one at a time, guarded by a lease",
    }
}

/// `probe`
pub(crate) fn probe(args: &StoreArgs, allow_many: bool) -> Result<()> {
    let store = match args.open() {
        Ok(store) => Some(store),
        Err(e) if is_no_store(&e) && !allow_many => None,
        Err(e) => return Err(e),
    };
    let single = store.as_ref().is_some_and(|s| s.repo().mode == Mode::Single);
    if let Some(store) = store.filter(|_| allow_many) {
        let report = store.allow_many_writers()?;
        if args.json {
            return say(&to_json(&report)?);
        }
        return say(&match single {
            true => format!("{}: now allows any number of writers", store.name()),
            false => format!("{}: already allows any number of writers", store.name()),
        });
    }
    let options = args.options(StoreOptions::default());
    let report = CheckpointStore::probe(&args.store, &args.storage()?, options)?;
    if args.json {
        say(&to_json(&report)?)?;
    }
    let name = redact_url(&args.store);
    if !report.many_writers() {
        return Err(Failure::Test(format!(
            "{name}: several writers are not safe here: {}; create a store for one writer at a time with \
             `s4w store init --writers single`",
            report.detail
        )));
    }
    if args.json { Ok(()) } else { say(&as_text(&name, &report, single)) }
}

fn as_text(name: &str, report: &ProbeReport, single: bool) -> String {
    let mut text = format!(
        "{name}: several writers are safe: a second create was refused, and each of {} races had one winner",
        report.rounds
    );
    if single {
        text.push_str(
            "\nthe existing store allows one writer at a time; use `--allow-many` to allow any number",
        );
    }
    text
}

fn is_no_store(failure: &Failure) -> bool {
    let Failure::Library(s4weights::Error::Store { source, .. }) = failure else { return false };
    matches!(**source, StoreError::NoStore { .. })
}

/// `break-lease`
pub(crate) fn break_lease(args: &StoreArgs) -> Result<()> {
    let store = args.open()?;
    let removed = store.break_lease()?;
    if args.json {
        return say(&to_json(&removed)?);
    }
    if removed.is_empty() {
        return say(&format!("{}: no lease to remove", store.name()));
    }
    removed
        .iter()
        .try_for_each(|holder| say(&format!("{}: removed the lease of {holder}", store.name())))
}
