//! What a server needs for its handshakes.
//!
//! Promises: read-only after it is made, shared by all threads. A client whose certificate is
//! required and missing, expired, revoked or of another authority fails the handshake; one whose
//! name is not allowed fails after it.

use std::sync::Arc;

use rustls::ServerConfig;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};

use crate::allow::AllowList;
use crate::pem;
use crate::source::{Side, Source, SourceError, wrong};

/// Whether clients need a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VerifyPeer {
    /// Yes where there are authorities, as QEMU: `ca-cert.pem` is there.
    #[default]
    WhereThereIsAnAuthority,
    /// Yes; without authorities that is an error.
    Yes,
    /// No: any client may come, and nothing of a certificate is asked for.
    No,
}

/// The certificate of a server, and which clients it lets in.
#[derive(Clone, Debug)]
pub struct ServerTls {
    pub(crate) config: Arc<ServerConfig>,
    pub(crate) allow: Option<Arc<AllowList>>,
}

impl ServerTls {
    /// Reads the files. Blocks for that.
    ///
    /// * `allow`: names of clients that are let in; `None`: all whose certificate is good.
    ///
    /// Errors: files that are missing, cannot be read or do not belong together; a list of names
    /// although no certificate is required.
    pub fn open(
        source: &Source,
        verify: VerifyPeer,
        allow: Option<AllowList>,
    ) -> Result<ServerTls, SourceError> {
        let files = source.read(Side::Server)?;
        let missing = |name: &str, word: &str| {
            let file = source.display_name(name, word);
            wrong(format!("Unable to access credentials {file}: No such file or directory"))
        };
        let Some(cert) = &files.cert else { return missing("server-cert.pem", "cert") };
        let Some(key) = &files.key else { return missing("server-key.pem", "key") };
        let verifies = match (verify, &files.ca) {
            (VerifyPeer::No, _) | (VerifyPeer::WhereThereIsAnAuthority, None) => None,
            (_, Some(ca)) => Some(ca),
            (VerifyPeer::Yes, None) => return missing("ca-cert.pem", "ca"),
        };
        if allow.is_some() && verifies.is_none() {
            return wrong(
                "names of clients can be checked only where clients need certificates: add the \
                 authority (ca-cert.pem), and leave verification on",
            );
        }
        let cannot = |error: &dyn std::fmt::Display| {
            SourceError(format!("{} cannot be used: {error}", cert.path.display()))
        };
        let provider = pem::provider();
        let verifier = match verifies {
            None => WebPkiClientVerifier::no_client_auth(),
            Some(ca) => {
                let roots = pem::roots(ca)?;
                let revoked = pem::revoked(files.crl.as_ref())?;
                WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
                    .with_crls(revoked)
                    .allow_unknown_revocation_status()
                    .enforce_revocation_expiration()
                    .build()
                    .map_err(|error| cannot(&error))?
            }
        };
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| cannot(&error))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(pem::chain(cert)?, pem::key(key)?)
            .map_err(|error| cannot(&error))?;
        // A session that goes on would not look at the client's certificate again.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(ServerTls { config: Arc::new(config), allow: allow.map(Arc::new) })
    }
}
