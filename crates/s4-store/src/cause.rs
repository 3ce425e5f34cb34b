//! Why requests fail, and what to do about it.

use std::{fmt, io};

use object_store::Error as StoreError;

use crate::failure::Answer;

/// The cause of a failed request to an object store or a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// Nobody listens at the address.
    Refused,
    /// There is no route to the address.
    Unreachable,
    /// The server's name is not known.
    Dns,
    /// No trusted, encrypted connection.
    Tls,
    /// No answer in time.
    Timeout,
    /// The connection broke.
    Reset,
    /// Not allowed: by the server (401, 403) or by the file system.
    Permission,
    /// No credentials were given, and the machine has none of its own.
    NoCredentials,
    /// The bucket or container does not exist.
    NoSuchBucket,
    /// The object or file does not exist.
    NotFound,
    /// The bucket is in another region.
    Region,
    /// The server asks for fewer requests.
    Throttled,
    /// The server failed (5xx).
    Server,
    /// The server says that the request is wrong (other 4xx).
    Rejected,
    /// Something exists already, or is not as expected; also a concurrent request.
    Conflict,
    /// The server or file system does not support what was asked for.
    Unsupported,
    /// No space is left, or a quota is exhausted.
    DiskFull,
    /// A read-only file system.
    ReadOnly,
    /// Part of the path is a file.
    NotADirectory,
    /// A folder is where a file should be.
    IsADirectory,
    /// A name is longer than the file system allows.
    NameTooLong,
    /// Larger than the file system or the server allows.
    TooLarge,
    /// Another store was made in the place of the one that was opened.
    Replaced,
    /// None of these.
    Other,
}

impl Cause {
    /// The cause of an object store's failure.
    #[must_use]
    pub fn of(error: &StoreError) -> Self {
        Answer::of(error).cause
    }

    /// The cause of a system's I/O error.
    #[must_use]
    pub fn of_io(error: &io::Error) -> Self {
        use io::ErrorKind as K;
        match error.kind() {
            K::ConnectionRefused => Self::Refused,
            K::HostUnreachable | K::NetworkUnreachable | K::NetworkDown | K::AddrNotAvailable => {
                Self::Unreachable
            }
            K::TimedOut => Self::Timeout,
            K::ConnectionReset
            | K::ConnectionAborted
            | K::BrokenPipe
            | K::NotConnected
            | K::UnexpectedEof => Self::Reset,
            K::PermissionDenied => Self::Permission,
            K::NotFound => Self::NotFound,
            K::AlreadyExists => Self::Conflict,
            K::StorageFull | K::QuotaExceeded => Self::DiskFull,
            K::ReadOnlyFilesystem => Self::ReadOnly,
            K::NotADirectory => Self::NotADirectory,
            K::IsADirectory => Self::IsADirectory,
            K::InvalidFilename => Self::NameTooLong,
            K::FileTooLarge => Self::TooLarge,
            K::Unsupported => Self::Unsupported,
            _ => Self::Other,
        }
    }

    /// Whether trying again is pointless. [`Cause::Conflict`] is not final: `object_store` reports every 409 that
    /// way, which may also mean a concurrent request. Neither is [`Cause::NotFound`]: others may remove a folder
    /// and create it again while a file is created in it.
    #[must_use]
    pub fn is_permanent(self) -> bool {
        match self {
            Self::Refused
            | Self::Unreachable
            | Self::Dns
            | Self::Timeout
            | Self::Reset
            | Self::Throttled
            | Self::Server
            | Self::Conflict
            | Self::NotFound
            | Self::Other => false,
            Self::Tls
            | Self::Permission
            | Self::NoCredentials
            | Self::NoSuchBucket
            | Self::Region
            | Self::Rejected
            | Self::Unsupported
            | Self::DiskFull
            | Self::ReadOnly
            | Self::NotADirectory
            | Self::IsADirectory
            | Self::NameTooLong
            | Self::TooLarge
            | Self::Replaced => true,
        }
    }

    /// Whether a server was not even reached: a wrong address looks the same as an outage, and a
    /// machine without credentials the same as one whose metadata service does not answer.
    pub(crate) fn is_before_contact(self) -> bool {
        matches!(
            self,
            Self::Refused | Self::Unreachable | Self::Dns | Self::Timeout | Self::NoCredentials
        )
    }

    /// In a few words, for the middle of a sentence.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Refused => "connection refused",
            Self::Unreachable => "server unreachable",
            Self::Dns => "unknown host name",
            Self::Tls => "TLS connection failed",
            Self::Timeout => "request timed out",
            Self::Reset => "connection lost",
            Self::Permission => "permission denied",
            Self::NoCredentials => "no credentials",
            Self::NoSuchBucket => "no such bucket",
            Self::NotFound => "not found",
            Self::Region => "wrong region",
            Self::Throttled => "too many requests",
            Self::Server => "server error",
            Self::Rejected => "request rejected",
            Self::Conflict => "conflict",
            Self::Unsupported => "not supported",
            Self::DiskFull => "no space left",
            Self::ReadOnly => "read-only file system",
            Self::NotADirectory => "not a directory",
            Self::IsADirectory => "is a directory",
            Self::NameTooLong => "name too long",
            Self::TooLarge => "too large",
            Self::Replaced => "another store is in its place",
            Self::Other => "failed",
        }
    }

    /// Advice on what to do next, if there is any.
    #[must_use]
    pub fn advice(self) -> Option<&'static str> {
        Some(match self {
            Self::Refused => "start the server, or check the endpoint and its port",
            Self::Unreachable => "check the network and the endpoint",
            Self::Dns => "check the endpoint's host name and the network",
            Self::Tls => {
                "check the endpoint, or give the server's CA certificate with the storage option \
                 `verify`"
            }
            Self::Timeout => "check the server and the network, or increase the timeout",
            Self::Reset => "check the network and the server's log",
            Self::Permission => {
                "check the credentials and their permissions, or the permissions of the folder"
            }
            Self::NoCredentials => {
                "set credentials in storage options, the environment or a profile, or `anon` for a \
                 public bucket"
            }
            Self::NoSuchBucket => "create the bucket, or check its name and the endpoint",
            Self::Region => "set the storage option `region` to the bucket's region",
            Self::Throttled => "use fewer concurrent requests, or wait",
            Self::DiskFull => "free some space, or choose another location",
            Self::ReadOnly => "mount it for writing, or choose another location",
            Self::NotADirectory | Self::IsADirectory => "check the path",
            Self::NameTooLong => "choose a shorter name",
            Self::Replaced => "reopen it to use the store that is there now",
            Self::NotFound
            | Self::Server
            | Self::Rejected
            | Self::Conflict
            | Self::Unsupported
            | Self::TooLarge
            | Self::Other => return None,
        })
    }

    /// The corresponding error number of the system, where there is one.
    #[must_use]
    #[cfg(target_os = "linux")]
    pub fn errno(self) -> Option<i32> {
        use rustix::io::Errno;
        let errno = match self {
            Self::Refused => Errno::CONNREFUSED,
            Self::Unreachable => Errno::HOSTUNREACH,
            Self::Timeout => Errno::TIMEDOUT,
            Self::Reset => Errno::CONNRESET,
            Self::Permission | Self::NoCredentials => Errno::ACCESS,
            Self::NoSuchBucket | Self::NotFound => Errno::NOENT,
            Self::DiskFull => Errno::NOSPC,
            Self::ReadOnly => Errno::ROFS,
            Self::NotADirectory => Errno::NOTDIR,
            Self::IsADirectory => Errno::ISDIR,
            Self::NameTooLong => Errno::NAMETOOLONG,
            Self::TooLarge => Errno::FBIG,
            Self::Throttled => Errno::BUSY,
            Self::Unsupported => Errno::OPNOTSUPP,
            Self::Dns
            | Self::Tls
            | Self::Region
            | Self::Server
            | Self::Rejected
            | Self::Conflict
            | Self::Replaced
            | Self::Other => return None,
        };
        Some(errno.raw_os_error())
    }

    /// The corresponding error number of the system: only known on Linux.
    #[must_use]
    #[cfg(not(target_os = "linux"))]
    pub fn errno(self) -> Option<i32> {
        None
    }

    pub(crate) fn of_status(status: u16, body: &str) -> Self {
        let says = |code: &str| body.contains(code);
        match status {
            401 | 403 => Self::Permission,
            404 if NO_BUCKET.iter().any(|code| says(code)) => Self::NoSuchBucket,
            404 => Self::NotFound,
            400 if says("ExpiredToken") || says("InvalidToken") => Self::Permission,
            // S3 answers this for a body that arrived late or damaged.
            400 if says("RequestTimeout") => Self::Timeout,
            400 if DAMAGED.iter().any(|code| says(code)) => Self::Reset,
            400 if says("AuthorizationHeaderMalformed") && says("region") => Self::Region,
            304 => Self::Conflict,
            300..400 => Self::Region,
            408 | 425 => Self::Timeout,
            409 | 412 => Self::Conflict,
            413 => Self::TooLarge,
            429 => Self::Throttled,
            400..500 => Self::Rejected,
            501 | 505 => Self::Unsupported,
            507 => Self::DiskFull,
            503 if says("SlowDown") || says("ServerBusy") => Self::Throttled,
            500.. => Self::Server,
            // Some servers answer 200 and report the failure in the body.
            _ if says("SlowDown") => Self::Throttled,
            _ => Self::Server,
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// Whether an error number means that a disk cannot read what it holds.
#[cfg(target_os = "linux")]
pub(crate) fn is_unreadable(errno: i32) -> bool {
    use rustix::io::Errno;
    [Errno::IO, Errno::BADMSG, Errno::UCLEAN].iter().any(|e| e.raw_os_error() == errno)
}

/// Whether an error number means that a disk cannot read what it holds: only known on Linux.
#[cfg(not(target_os = "linux"))]
pub(crate) fn is_unreadable(_: i32) -> bool {
    false
}

/// Error codes for a body that does not match its checksum or signature.
const DAMAGED: [&str; 3] =
    ["BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"];

/// Codes of a missing bucket or container.
const NO_BUCKET: [&str; 3] = ["NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"];
