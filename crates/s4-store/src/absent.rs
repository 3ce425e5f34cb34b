//! Distinguishes a place that holds no store from one that cannot be seen or has lost part of its
//! store: a run must not start over because of a typo or an unmounted folder.

use crate::error::{Error, Result};
use crate::io::Io;
use crate::layout::Layout;

/// The error for a missing `repo.json`: [`Error::NoStore`] only if listings show that there is nothing;
/// [`Error::StoreExists`] if somebody has created a store in the meantime.
pub(crate) async fn why_absent(io: &Io, layout: &Layout, place: &str) -> Error {
    match look(io, layout).await {
        Ok(None) => Error::NoStore { place: place.to_owned() },
        Ok(Some(_)) if io.head(&layout.repo()).await.is_ok() => {
            Error::StoreExists { place: place.to_owned() }
        }
        Ok(Some(there)) => Error::corrupt(
            layout.repo(),
            format!(
                "it is missing, but `{there}` exists, so this was a store: restore `repo.json` from a copy, or \
                 move the rest away"
            ),
        ),
        // The key itself can be missing in a place that exists; a listing needs only the place.
        Err(Error::Missing { .. }) => Error::NoBucket { place: place.to_owned() },
        Err(e) => e,
    }
}

/// An object of a store's log or checkpoints, if there is any.
async fn look(io: &Io, layout: &Layout) -> Result<Option<String>> {
    for part in [layout.log(), layout.checkpoints()] {
        match io.first_below(&part).await {
            Ok(Some(found)) => return Ok(Some(found.location.to_string())),
            Ok(None) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(None)
}
