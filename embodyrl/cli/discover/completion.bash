_embodyrl() {
    local word="${COMP_WORDS[COMP_CWORD]}" words
    COMP_WORDBREAKS="${COMP_WORDBREAKS//=/}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="@commands@"
    else
        case "${COMP_WORDS[1]}:$word" in
@flags@
        *) words="@options@ @keys@" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace
    return 0
}
complete -o default -F _embodyrl embodyrl
