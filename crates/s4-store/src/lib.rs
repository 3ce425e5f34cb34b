#![forbid(unsafe_code)]
//! wip
mod attempt; mod retention; mod sweep; mod rebase; mod check; mod entry; mod error; mod id; mod io; mod layout; mod local; mod log; mod manifest; mod options; mod place; mod probe; mod reading; mod repo; mod seal; mod state; mod store; mod view; mod url; pub use url::StorageOptions; pub mod testing;
pub use attempt::*; pub use retention::*; pub use sweep::*; pub use rebase::*; pub use check::*; pub use entry::*; pub use error::*; pub use id::*; pub use state::*; pub use options::*; pub use place::*; pub use store::*; pub use reading::*; pub use repo::*; pub use probe::*; pub use manifest::*;
