//! Who may connect to `ringdisk serve --nbd`, from the words to what the export takes.
//!
//! Promises: keys and certificates are read here, before the process is confined; users and groups
//! are looked up here.

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::run_as;
use ringdisk_daemon::sockets;
use ringdisk_nbd::{AllowList, AllowedUsers, ServerTls, TlsOptions, VerifyPeer};

use crate::cli::{NbdAccessArgs, TlsWord, VerifyWord};

/// Who may connect.
pub(in crate::commands::serve) struct Access {
    pub(in crate::commands::serve) tls: Option<TlsOptions>,
    pub(in crate::commands::serve) users: Option<AllowedUsers>,
}

/// Errors: files that are missing or wrong, users and groups that do not exist.
pub(in crate::commands::serve) fn access(args: &NbdAccessArgs) -> Result<Access, Failure> {
    Ok(Access { tls: tls(args)?, users: users(args)? })
}

fn tls(args: &NbdAccessArgs) -> Result<Option<TlsOptions>, Failure> {
    let Some(source) = &args.tls_creds else { return Ok(None) };
    let verify = match args.tls_verify_peer {
        None => VerifyPeer::WhereThereIsAnAuthority,
        Some(VerifyWord::Yes) => VerifyPeer::Yes,
        Some(VerifyWord::No) => VerifyPeer::No,
    };
    let named = (!args.tls_allow.is_empty()).then(|| AllowList::exact(args.tls_allow.clone()));
    let allow = args.rules.clone().or(named);
    let server = ServerTls::open(source, verify, allow)
        .map_err(|error| Failure::new(Exit::Usage, error.to_string()))?;
    Ok(Some(TlsOptions { server, required: args.tls != Some(TlsWord::Allowed) }))
}

fn users(args: &NbdAccessArgs) -> Result<Option<AllowedUsers>, Failure> {
    if args.allow_user.is_empty() && args.allow_group.is_empty() {
        return Ok(None);
    }
    let mut allowed = AllowedUsers::default();
    for user in &args.allow_user {
        allowed.users.push(run_as::number_of("--allow-user", user)?);
    }
    for group in &args.allow_group {
        let number = sockets::group(group).map_err(|failure| failure.context("--allow-group"))?;
        allowed.groups.push(number);
        // A process need not have the groups that its user is a member of.
        allowed.users.extend(run_as::members_of(number));
    }
    Ok(Some(allowed))
}
