//! The words of `ringdisk serve --nbd` about who may connect.
//!
//! Promises: parses only; no key, certificate or user is looked up.

use clap::Args;
use ringdisk_nbd::{AllowList, TlsSource, VerifyPeer};

use crate::cli::words::{Words, one_of};

/// The words of `--tls`: whether it is optional.
const TLS: &Words<bool> = &[
    ("required", "Clients that do not encrypt are refused", false),
    ("allowed", "Clients may encrypt", true),
];

/// The words of `--tls-verify-peer`.
const VERIFY: &Words<VerifyPeer> = &[
    ("yes", "Clients need a certificate", VerifyPeer::Yes),
    ("no", "Any client may come", VerifyPeer::No),
];

/// Who may connect, and how.
#[derive(Args, Clone, Debug)]
pub(crate) struct NbdAccessArgs {
    /// Encrypt NBD connections by TLS, with the keys and certificates of DIR
    ///
    /// DIR is in QEMU's layout: server-cert.pem and server-key.pem; with ca-cert.pem clients need a
    /// certificate of that authority that ca-crl.pem does not list as revoked. In place of DIR:
    /// cert=FILE,key=FILE[,ca=FILE][,crl=FILE], where fd:N as FILE is a descriptor of this process
    /// (`key=fd:3`). They are read once, at the start.
    #[arg(long, value_name = "DIR", value_parser = TlsSource::parse, requires = "nbd",
          help_heading = "NBD options")]
    pub(crate) tls_creds: Option<TlsSource>,

    /// Whether NBD clients have to encrypt [default: required]
    #[arg(
        id = "tls",
        long = "tls",
        value_name = "WHEN",
        value_parser = one_of(TLS),
        requires = "tls_creds",
        help_heading = "NBD options"
    )]
    pub(crate) tls_is_optional: Option<bool>,

    /// Whether NBD clients need a certificate: yes or no [default: yes if there is a ca-cert.pem]
    #[arg(long, value_name = "YES", value_parser = one_of(VERIFY), num_args = 0..=1,
          require_equals = true, default_missing_value = "yes", requires = "tls_creds",
          help_heading = "NBD options")]
    pub(crate) tls_verify_peer: Option<VerifyPeer>,

    /// Let in only NBD clients with this name in their certificate; may be repeated
    ///
    /// The whole distinguished name, in the order of the certificate: `O=Example,CN=backup`. The
    /// log shows the name of a client that is sent away.
    #[arg(long, value_name = "NAME", requires = "tls_creds", help_heading = "NBD options")]
    pub(crate) tls_allow: Vec<String>,

    /// Let in only processes of USER (a name or a number) at Unix sockets; may be repeated
    ///
    /// Processes of root are let in always.
    #[arg(long, value_name = "USER", requires = "nbd", help_heading = "NBD options")]
    pub(crate) allow_user: Vec<String>,

    /// Let in only processes of the members of GROUP at Unix sockets; may be repeated
    #[arg(long, value_name = "GROUP", requires = "nbd", help_heading = "NBD options")]
    pub(crate) allow_group: Vec<String>,

    /// Names of clients by rules, as `qemu-nbd --object authz-list` has them.
    #[arg(skip)]
    pub(crate) rules: Option<AllowList>,
}

impl NbdAccessArgs {
    pub(super) fn has_key_of_descriptor(&self) -> bool {
        self.tls_creds.as_ref().is_some_and(TlsSource::has_descriptor)
    }
}
